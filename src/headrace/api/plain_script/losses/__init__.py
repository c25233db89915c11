"""What is looked at of a script's losses and forwards in its first steps."""
