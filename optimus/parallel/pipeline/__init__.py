"""Pipeline parallelism: schedules as lists of actions, their executor and their simulation."""
