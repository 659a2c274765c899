"""What the live page is told: the fleet, its caches, requests and events, as changes."""
