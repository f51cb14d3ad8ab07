"""`tensorflowonspark`: TFCluster, TFParallel, TFNode and kin, as gangs of Tritium's (driver and rank)."""
