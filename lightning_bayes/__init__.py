"""Calibrated uncertainty for any LightningModule."""
