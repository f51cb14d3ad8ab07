"""Start a gang from the driver, watch it, and turn its end into results or one error (driver)."""
