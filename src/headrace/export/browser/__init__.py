"""The trained model as a page: a folder that any static web server can serve."""
