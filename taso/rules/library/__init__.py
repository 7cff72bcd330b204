"""The rules that come with taso."""
