"""The model computes: `StepPlan` in, `StepResult` out. Of the engine it imports the messages of a step only."""
