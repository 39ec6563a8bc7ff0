"""What of torch holds for the whole process: functions over lists of tensors, and hooks."""
