"""What the doctor measures of a posterior before its rules are applied."""
