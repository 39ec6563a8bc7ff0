"""The functions that verbs call; `verb_table` names them."""
