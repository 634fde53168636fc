"""The deciding half of safepool: pure code, no system calls, no clocks, no threads."""
