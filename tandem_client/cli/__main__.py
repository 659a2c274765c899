"""`python -m tandem_client.cli` is `tandem`."""

from tandem_client.cli import main

if __name__ == "__main__":
    main()
