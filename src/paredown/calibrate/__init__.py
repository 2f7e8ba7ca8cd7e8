"""What a plan's choices cost on this device, measured in under a minute: `calibrate`, in calibrate/device_calibration.py."""
