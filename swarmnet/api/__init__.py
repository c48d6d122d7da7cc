"""What `import swarmnet` offers. Its names are to be had from there: these modules may change."""
