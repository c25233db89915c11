"""How bytes move from stage to stage."""
