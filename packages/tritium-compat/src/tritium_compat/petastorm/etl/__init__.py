"""How data sets are written (driver)."""
