"""What a run tells: metrics, progress, TensorBoard, reports."""
