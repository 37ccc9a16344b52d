"""Drafts in a step: their layout, their verification, and the drafts for the next step."""
