"""Who decides where a simulated request goes: Tandem's router, and the rules of others."""
