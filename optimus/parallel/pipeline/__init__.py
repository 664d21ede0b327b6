"""Pipeline parallelism: construction, execution and simulation of pipeline schedules."""
