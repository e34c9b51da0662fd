"""An example service: it charges for orders, each exactly once."""
