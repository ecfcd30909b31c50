"""Batching rules: who computes in a step. One file per rule, all behind `rule.BatchingRule`."""
