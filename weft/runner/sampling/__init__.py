"""Sampling in a step: ``StepSampler`` samples its tokens; the rows' parameters and histories are behind it."""
