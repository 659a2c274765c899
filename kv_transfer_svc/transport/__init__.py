"""How do bytes get from another KV service to here? One interface, three ways, negotiated and measured per pair."""
