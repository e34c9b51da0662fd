"""Bridges to libraries that Cyclone does not need; each is imported by whoever has its library."""
