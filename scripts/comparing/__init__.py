"""What scripts/compare is made of: transfer engines side by side on one machine."""
