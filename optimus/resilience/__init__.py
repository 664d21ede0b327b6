"""Detection of faults before they spread: values that are not finite."""
