"""Pipeline parallelism: schedules as values, and what runs, proves and times them."""
