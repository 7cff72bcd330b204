"""How graphs run, and how long they take."""
