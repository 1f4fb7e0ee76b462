"""For those who write methods and specs: a schema for editors, dry runs, explanations, new packages, checks."""
