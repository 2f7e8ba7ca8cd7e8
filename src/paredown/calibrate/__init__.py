"""What a plan's choices cost on this device, measured in about 20 s: `calibrate`, in calibrate/device_calibration.py."""
