"""Any function of the user's as an estimator, whatever its framework (driver, rank)."""
