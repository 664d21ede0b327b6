"""Pipeline parallelism: schedules as values, and what runs and times them."""
