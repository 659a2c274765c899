"""Messages of earlier releases, as their processes sent them."""
