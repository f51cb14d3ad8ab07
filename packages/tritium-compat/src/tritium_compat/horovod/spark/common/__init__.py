"""What the estimators of `horovod.spark` share: parameters, store, backend (driver)."""
