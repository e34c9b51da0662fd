"""How fast Cyclone is, measured against yardsticks in the same run. `README.md` says what each figure means."""
