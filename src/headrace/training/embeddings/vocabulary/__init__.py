"""Tables of which only a limited number of rows is held: how they find rows, and which they drop."""
