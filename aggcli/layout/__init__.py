"""Layouts: which rank and micro-batch computes which sample, and which context-parallel rank which token."""
