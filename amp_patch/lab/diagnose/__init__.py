"""Diagnosis of one model: inspect, explain, find_loss_scale, compare_outputs, and the advice that they derive."""
