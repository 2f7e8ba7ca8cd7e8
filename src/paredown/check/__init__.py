"""Whether a plan is right (`verify`), where a step is sensitive (`probe`), and when training changes the plan (`Guard`)."""
