"""What ZeRO gathers, and when: units of a model, parts called alone, several forward passes."""
