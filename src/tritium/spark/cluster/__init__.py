"""The kinds of clusters: their slots, resource profiles and addresses (driver)."""
