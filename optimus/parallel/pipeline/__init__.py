"""Pipeline parallelism: schedules as values, their executor and their simulation."""
