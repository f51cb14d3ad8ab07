"""What a rank needs before and after the user's function, one file a framework (rank)."""
