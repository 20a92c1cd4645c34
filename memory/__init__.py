"""Memory tiers and the schedule that moves values between them."""
