"""What a plan's choices cost on this device, measured in under 30 seconds: `calibrate`, in calibrate/device_calibration.py."""
