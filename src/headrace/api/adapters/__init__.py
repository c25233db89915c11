"""Training code of other libraries as jobs; none of them is imported here."""
