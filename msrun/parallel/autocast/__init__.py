"""What torch's autocast does, for operators that the runtime computes in place of torch's."""
