"""General tools on torch's objects: patches with undo, generated classes, containers, compiled and distributed code."""
