"""The doing half of safepool: the only code that asks the operating system about processes."""
