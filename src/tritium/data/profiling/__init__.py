"""What an exchange will do, measured before it is done: see `tritium.profile` (driver, Spark's Python worker)."""
