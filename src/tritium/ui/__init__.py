"""The page over run directories, `tritium ui` (driver). Nothing here is sent to executors."""
