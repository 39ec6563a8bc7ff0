"""The model as plain data: values, operators, and how each operator can be sharded."""
