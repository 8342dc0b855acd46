"""One call of a module as compiled programs: built once, run at every step."""
