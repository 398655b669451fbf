"""The numeric operations: their contract, and the implementations of it."""
